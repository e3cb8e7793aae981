"""One module for each part of the check, with a function `run(context, report)`, run in a process of its own."""
