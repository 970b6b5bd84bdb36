/* SPDX-License-Identifier: Apache-2.0
   SPDX-FileCopyrightText: The xpuruntime developers

   For LD_PRELOAD: what is freed is overwritten and never given out again, and a thread that called
   slow_end() waits at each mutex while its thread-local objects are destroyed, so that another
   thread can free what these use. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define LARGEST 4096

extern int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern void __libc_free(void*);
extern void* __dso_handle;

static __thread int ending;
static volatile int spoils;

static void begin_end(void* unused) {
  (void)unused;
  ending = 1;
}

void slow_end(void) { __cxa_thread_atexit_impl(begin_end, NULL, &__dso_handle); }

void spoil(int on) { spoils = on; }

void free(void* memory) {
  if (memory == NULL) return;
  if (!spoils || malloc_usable_size(memory) > LARGEST) {
    __libc_free(memory);
    return;
  }
  memset(memory, 0xDB, malloc_usable_size(memory));
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static int (*lock)(pthread_mutex_t*);
  if (lock == NULL) *(void**)&lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
  if (ending) usleep(40000);
  return lock(mutex);
}
