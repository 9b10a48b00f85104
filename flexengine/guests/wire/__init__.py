"""The connection of processes: framed messages over sockets, their packing, and processes that this one starts."""
