"""Hyperparameters of training, the same in every engine."""

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""GPT-3's optimizer (Brown et al. 2020, arXiv 2005.14165, appendix B), its learning rate for 760M and smaller models
rounded; the rate stays constant, since a trial is short."""
CLIP_NORM = 1.0
"""Gradient norm above which gradients are scaled down to it (same source)."""
