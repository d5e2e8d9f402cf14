"""Every experiment by topic, the runner that measures them and the worker process that runs the instruments."""
