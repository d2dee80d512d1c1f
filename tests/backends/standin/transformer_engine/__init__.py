"""A stand-in with the interface of Transformer Engine 2.20 that runs on the CPU: tests put it on sys.path.

It keeps what the backend depends on: state made in the first FP8 region, amaxes written where quantizers point, process
wide buffers of amaxes whose scales move at the end of a region, FP8 weights kept over micro-batches, sizes that the
real kernels ask for, and extra state in the state_dict. Its amax drops NaN as fmaxf does.
"""
