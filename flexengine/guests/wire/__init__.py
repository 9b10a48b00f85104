"""The connection of processes: framed messages over sockets, their packing, the proof of a shared secret before them,
and processes that this one starts."""
