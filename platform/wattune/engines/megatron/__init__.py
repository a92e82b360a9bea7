"""The Megatron-Core engine."""

from wattune.engines.megatron.cudnn import share_torchs_cudnn

share_torchs_cudnn()
