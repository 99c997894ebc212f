"""A CUDA device made of the CPU: finds missing waits between streams on a machine without a GPU.

On a GPU, work is put on *streams*. A stream runs its own work in order, but two streams run beside each other, and the
host runs ahead of them all. Where one stream uses what another has written, the program has to say so: with an event, a
``wait_stream``, a ``synchronize``. A program that forgets it is mostly right, and sometimes silently wrong: it has a
*race*. Running it tells little, as the timing of the day decides. This device decides by rules instead.

What is simulated
    Tensors really are ``cuda`` tensors, to torch and to the program. Each op runs at once, on the host, with torch's
    kernel for the CPU, on the memory of the device. So numbers are those of the CPU.

    A stream does not run anything. It counts its work, and keeps a *vector clock*: for every other stream, up to which
    piece of work it is known to come after. Events carry such clocks from stream to stream, and so do the waits of the
    host. Autograd's own threads, streams and waits are torch's.

    Each op says which memory it reads and writes. Two uses of the same memory of which one writes, and of which neither
    is known to come after the other, are a race, in whatever order they happened to run. ``races()`` lists them.

    The caching allocator gives memory that is freed to later work of the stream that it was allocated on. Freeing what
    another stream may still use is thus a race, unless ``record_stream`` has said so, or the first stream waits for the
    other. For the same reason another stream may use new memory only when it waits for the stream that it is from. New
    memory is NaN.

    The host's own reads and writes of pinned memory are uses as well: ``host_access`` tells of them. Copies between
    device and host tell by themselves. Memory that was given to ``cudaHostRegister`` is pinned until it is taken back,
    and by then the host must have waited for all that the device does with it.

    Queries (``event.query()``) have no true answer, as nothing takes time. ``set_arrival`` chooses one: what the host
    has not waited for never is over, always is, or is at random. All are right on a real device, at some time or other.

What cannot be found this way
    NCCL's own hangs, as no NCCL runs. Races inside a kernel, as one is a single piece of work here. What graph capture
    does. Speed. A wait that is missing where another wait makes up for it. Order between threads of the host: all of
    them are one host here. Reads and writes of pinned memory by the host that nobody tells of.

Which GPU is the rank's
    ``SIMULATED_GPU_NUMBER`` is its number, 0 as a rule. Those below it are other ranks'. The current one is GPU 0, as
    in a program that never calls ``torch.cuda.set_device``. What is not told its device uses that one. This raises:
    an allocation, a stream, a wait of the host, memory that is pinned.

What is not there
    A second device that works, sparse tensors, CUDA graphs, Triton. Random numbers are the host's, so
    ``torch.manual_seed`` gives those of the CPU.

``load()`` comes before torch is imported, so a test runs its body in a process of its own.

Where a change goes
    The device, which knows nothing of zero_optim::

        clocks.h        which work comes after which
        memory.h        what is a race, what is freed too early
        kernels.h       how an op runs, what it reads and writes
        guard.h         what torch's C++ asks of a device
        device.cpp      what is registered with torch
        build.py        compiles it
        device.py       loads it; races, counts, what queries say
        torch_cuda.py   what replaces functions of torch.cuda
        ops.py          what a simulated collective is made of
        worker.py       the process in which its tests run

    The two simulations of NCCL, which stand in for ``zero_optim.comm.transport``::

        transport.py    the data of a collective, and the order of issue
        held.py         CPU tensors: what happens between issue and wait
        streams.py      the device: the same
        operators.py    which memory an operator of torch uses
        switch.py       which simulation runs; tests/harness.py asks it

    The checks::

        programs.py     the order programs of tests/order_programs.py, on ranks
        fault.py        what a seeded fault is
        faults.py       the table of them
        store_faults.py those of the stores
        fault_check.py  runs it
        __main__.py     make race-check
"""

from __future__ import annotations

from .build import Unavailable, library
from .device import Race, clear, counts, host_access, install, load, races, set_arrival

__all__ = [
    "Race",
    "Unavailable",
    "clear",
    "counts",
    "host_access",
    "install",
    "library",
    "load",
    "races",
    "set_arrival",
]
