"""The store: disk tier, memory tier in the shared-memory pool, and what joins them."""
