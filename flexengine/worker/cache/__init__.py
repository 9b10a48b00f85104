"""The KV cache: pools of pages, the tables of each gpu_batch, copies between tiers, and attention over the pages."""

from flexengine.worker.cache.cache import Cache
from flexengine.worker.cache.tables import Tables, View, copy_pages, packed

__all__ = ["Cache", "Tables", "View", "copy_pages", "packed"]
