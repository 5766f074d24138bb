"""Operations on tensors: one folder per op with its contract, reference and implementations.

Owns how an op runs fast on a device. Refuses to know models, requests, pools and configuration.
"""
