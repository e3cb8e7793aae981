"""Weights and a family description become ONNX graphs in a bundle."""
