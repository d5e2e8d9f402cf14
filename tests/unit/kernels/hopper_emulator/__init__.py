"""Runs the Hopper kernels, which are written in Gluon, on the CPU, where Triton's interpreter knows no Gluon.

The kernels' own source runs as Python, with `language.py` in place of Triton's modules: `install` puts it there, in a
process of its own. What the hardware does at the same time runs in random order: warpgroups are threads of which one
runs at a time, copies by the copy engine arrive late, and matmuls read shared memory when they start or when they are
waited for. In most programs one warpgroup, or all copies to shared memory, wait until nothing else can run: that shows
signals that a slow warpgroup misses. `machine.py` has the parts with state: shared memory, barriers, copies,
warpgroups.

It finds wrong indices, masks, phases of barriers, and numbers of bytes; deadlocks; accesses outside of all tensors of
the kernel; copies that nothing waits for; reads of shared memory before a copy has arrived, after its place was given
to the next copy, or without the fence that makes a thread's stores visible to the copy engine and the tensor cores.

It knows nothing of register layouts, register allocation and instructions, of the threads within a warpgroup, of
kernels and programs that overlap in time, nor of the fence after the initialisation of barriers: for these there are
the compiler and tests/gpu.
"""

from tests.unit.kernels.hopper_emulator.language import install

__all__ = ["install"]
