"""First workload file of a job, from a few answers.

`entry.draft` is the whole of it. `machines` turns an answer into a cluster, `model_names` into a model, `methods` into
keys of training. `layouts` searches for a layout that fits. `job_file` writes the file, a comment beside each key.
"""
