"""Views of compacted topics, for lookups from any process."""
