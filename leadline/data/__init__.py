"""Data for training and for experiments: images and text as tensors."""

from leadline.data.images.digits import load_digits

__all__ = ["load_digits"]
