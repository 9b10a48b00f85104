"""The KV cache: pools of pages, the tables of each gpu_batch, copies between tiers, and attention over the pages."""

from flexengine.worker.cache.cache import Cache, copy_pages
from flexengine.worker.cache.tables import View, packed

__all__ = ["Cache", "View", "copy_pages", "packed"]
