"""A CUDA device made of the CPU: finds missing waits between streams on a machine without a GPU.

A program that forgets a wait is usually right, and sometimes silently wrong: it has a *race*. This device decides by
rules and not by timing. Everything is as late as the rules allow: work on a stream comes after other work only where an
event, a stream wait or a synchronisation orders the two, and ``event.query()`` is True only if the host has waited.

- Tensors are ``cuda`` tensors. Each op runs at once with torch's CPU kernel, so numbers are those of the CPU.
- A stream counts its work and keeps a *vector clock*: up to which piece of work of every other stream it is ordered.
  Events carry such clocks, and so does the host. Autograd's threads, streams and waits are torch's.
- Two uses of the same memory, of which one writes and neither is ordered after the other, are a race.
- Freed memory goes to later work of the stream on which it was allocated. So it is a race to free what another stream
  uses, without ``record_stream`` or a wait, and to use new memory elsewhere without a wait. New memory is NaN.
- The host uses pinned memory too, and must wait for the device before it writes, reads or unregisters it.
- A collective is a piece of work on its group's stream, and its outputs are NaN until ``wait``.
- ``torch.cuda`` raises where a call that names no device uses another GPU than the rank's.

Not seen: races inside a kernel, NCCL's own hangs, graph capture, speed, what follows from a query that is True, and a
missing wait that another wait makes up for. All ranks' hosts wait for data over gloo. So a program cannot run here in
which rank 0's host needs an answer of rank 1's host, while rank 1's stream waits for a collective of rank 0.

The device, in C++, which knows nothing of zero_optim: ``clocks.h`` (order), ``memory.h`` (races), ``kernels.h`` (ops),
``guard.h`` (what torch asks of a device), ``device.cpp`` (registration). In Python ``build.py``, ``device.py`` and
``torch_cuda.py`` load it; ``transport.py`` and ``watch.py`` are NCCL and the program's view of it; ``switch.py`` starts
ranks on it; ``faults.py`` has faults that must be noticed; ``__main__.py`` is ``make race-check``.
"""
