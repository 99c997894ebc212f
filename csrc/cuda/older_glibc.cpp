// What CUDA's static runtime calls of glibc, under the versions that glibc has had from the beginning. From 2.34 on the
// linker would take newer versions of the same functions, and the library would not load on an older Linux
// (manylinux_2_28). There they are in libpthread, libdl and librt, which torch has loaded.
#if defined(__linux__) && defined(__x86_64__)
#include <features.h>
#if defined(__GLIBC__)

// Each is a jump, so that glibc sees the address of the caller: dlsym looks at it.
asm(R"(
    .macro jump_to version, names:vararg
      .irp name, \names
        .symver glibc_\name, \name\()@GLIBC_\version
        .globl \name
        .hidden \name
        .type \name, @function
        \name: jmp *glibc_\name\()@GOTPCREL(%rip)
      .endr
    .endm

    .text
    jump_to 2.2.5, dlclose, dlerror, dlopen, dlsym, dlvsym, shm_open, shm_unlink
    jump_to 2.3.4, dlmopen
    jump_to 2.2.5, sem_destroy, sem_init, sem_post, sem_timedwait, sem_trywait, sem_wait
    jump_to 2.2.5, pthread_create, pthread_detach, pthread_join, pthread_kill, pthread_once
    jump_to 2.2.5, pthread_key_create, pthread_key_delete, pthread_getspecific, pthread_setspecific
    jump_to 2.2.5, pthread_condattr_setpshared, pthread_mutex_trylock, pthread_mutexattr_destroy
    jump_to 2.2.5, pthread_mutexattr_init, pthread_mutexattr_setpshared, pthread_mutexattr_settype
    jump_to 2.2.5, pthread_rwlock_destroy, pthread_rwlock_init, pthread_rwlock_rdlock, pthread_rwlock_timedrdlock
    jump_to 2.2.5, pthread_rwlock_timedwrlock, pthread_rwlock_tryrdlock, pthread_rwlock_trywrlock
    jump_to 2.2.5, pthread_rwlock_unlock, pthread_rwlock_wrlock, pthread_rwlockattr_destroy
    jump_to 2.2.5, pthread_rwlockattr_init, pthread_rwlockattr_setpshared, pthread_spin_destroy
    jump_to 2.2.5, pthread_spin_init, pthread_spin_lock, pthread_spin_trylock, pthread_spin_unlock
)");

#endif
#endif
