// Handles: addresses that nobody reads, each given out once.
#include "standin.h"
#include <stdatomic.h>
#include <stdint.h>

void *new_handle(void) {
  static atomic_uintptr_t last = 0x1000;
  return (void *)atomic_fetch_add(&last, 16);
}
