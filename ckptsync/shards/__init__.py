"""Shards: safetensors files in layer order, digested in the pass that writes them.

`plan` says which tensor goes where, `write` and `read` speak the file format, `index` and `hf_folder` a
Hugging Face folder of several files. None of them imports torch; `tensors` and `load` do.
"""
