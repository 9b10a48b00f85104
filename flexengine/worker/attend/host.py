"""The attender of host RAM: the CPU computes attention over the pages of the host."""

import torch

from flexengine.kernels import load
from flexengine.plan.facts import ModelFacts
from flexengine.plan.layout import Layout
from flexengine.tier.machine import Machine
from flexengine.worker.attend.buffered import BufferedAttender
from flexengine.worker.cache import Cache, View, copy_pages


class HostAttender(BufferedAttender):
    """Computes attention on the CPU, over pages in host RAM."""

    def __init__(
        self, place: str, model: ModelFacts, layout: Layout, machine: Machine, cache: Cache, dtype: torch.dtype
    ) -> None:
        super().__init__(place, model, layout, machine, cache, dtype)
        self.kernels = load()
        what = "delegation workspace"
        self.regions.keep_room("host", layout.account["host"][what], what)

    def attend(self, k: int, view: View) -> None:
        asked, cache = self._asked[k], self.cache
        question, answer = self._in_ram(k)
        q, keys, values = self._vectors(question, k)
        pool, form = cache.on_host(asked.layer)
        tables = cache.tables(view, asked.layer)
        copy_pages(pool, tables)
        self.kernels.append(keys, values, pool, tables.pages, tables.offsets, form)
        out = self.kernels.decode_attention(q, pool, tables.tables, tables.lengths, asked.options, form)
        answer.copy_(out.view(-1))
