// The log: one line an event, written while a file is open. Everything that the study counts is counted from it.
//
// It holds what was asked for, in the order in which the host asked. It holds no times: nothing is computed.
#include "standin.h"
#include <pthread.h>
#include <stdarg.h>

static FILE *file;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Log to `path` from now on; an empty path ends the log. Called by the study (worker.py).
ANSWER void standin_log(const char *path) {
  pthread_mutex_lock(&lock);
  if (file) fclose(file);
  file = path && *path ? fopen(path, "w") : NULL;
  pthread_mutex_unlock(&lock);
}

int is_noting(void) { return file != NULL; }

void note(const char *format, ...) {
  if (!file) return;
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  if (file) {
    vfprintf(file, format, arguments);
    fputc('\n', file);
  }
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}
