"""Training of speculators: text that the target writes itself, features from its graph, heads in torch.

The target writes its text as it runs for everybody, so this package, alone of `export`, uses `specrun.runtime`: its
sessions, tokenizer and chat template, as any program does that embeds it. The runtime never imports `specrun.export`.
Importing this package needs no torch; the modules that train do, and the processes that write text load none of those.
"""
