"""Commands as functions of Python, each with its result: check, collective, topology, validate, schemas."""
