"""Tokens drawn on the device."""
