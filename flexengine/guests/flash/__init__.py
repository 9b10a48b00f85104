"""Flash mode: feed-forward blocks of sparse models, of which only the neurons that will be active are read."""
