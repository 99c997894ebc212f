// What newer compilers take from the system's C and C++ libraries, defined once more, so that a library that one
// machine builds loads on any Linux with glibc 2.28 and the libstdc++ of GCC 8 (manylinux_2_28). Nothing of it is
// exported: the linker has csrc/exports.map.
#if defined(__linux__)
#include <new>
#include <sstream>

#if defined(__GLIBCXX__)
namespace std {
// Headers of GCC 11 and newer call constructors and str() that libstdc++ has from 3.4.26 and 3.4.29 on.
template class basic_stringbuf<char>;
template class basic_ostringstream<char>;
template class basic_stringstream<char>;

void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif

// glibc has it from 2.32 on: not 0 while a process has one thread, and reference counts are then not atomic.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif
