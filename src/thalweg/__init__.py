"""Thalweg: the residual stream of deep transformers."""

