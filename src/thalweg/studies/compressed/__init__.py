"""Studies of compressions: what many compressors cost, which layer-wise number foretells it, and whether the layers it names are worth
protecting.
"""
