"""The transactional sink. ``batch.py`` holds the steps of a batch, in order; start reading there."""
