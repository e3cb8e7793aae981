"""Where bundles live: manifest schema, layout, sources, integrity, locks, errors."""
