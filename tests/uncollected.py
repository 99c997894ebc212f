"""Python's garbage collector does nothing from here on. What is imported stays, so nobody need walk it again and again
to find what does not: that is a quarter of the time of torch's import.
"""

import gc

gc.disable()
