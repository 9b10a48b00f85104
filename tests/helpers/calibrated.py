"""What tests of calibration share."""

from flexengine import Policy

TOKENS = 48
SPREAD = Policy(gpu_batch_size=2, num_gpu_batches=3, weights=(0.4, 0.3, 0.3), cache=(0.4, 0.3, 0.3), prefill_tokens=64)
