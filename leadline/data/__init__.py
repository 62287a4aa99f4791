"""Data behind one small interface: images and labels as tensors."""

from leadline.data.images.digits import load_digits

__all__ = ["load_digits"]
