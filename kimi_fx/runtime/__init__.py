"""Effects: devices, loading, pages, slots."""
