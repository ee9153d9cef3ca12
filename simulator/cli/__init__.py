"""The command line: one module per command, each with a function ``command`` that `app` registers."""
