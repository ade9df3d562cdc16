"""What Megatron needs where there is no CUDA or no Transformer Engine.

`proxy.install` is entered from `trainer/device.py`, `attention.use_local_modules` from `trainer/bridge.py`; nothing
else of the trainer knows this folder.
"""
