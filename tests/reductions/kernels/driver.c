/* The part of the CUDA driver that a launch uses. It writes the launches down instead of running them. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define WORDS 24

int64_t calls[64][WORDS]; /* kernel, grid, threads, shared memory, stream, and the arguments */
int count, status, failing_kernel, appended;

static const size_t sizes[2][10] = {{8, 8, 8, 8, 4, 8, 8, 8, 8, 8}, {8, 8, 4, 8, 8, 8}};

/* Kernel 1 is reduce_share and kernel 2 is merge_shares, each with the pointers that Triton appends. */
static size_t size_of(int kernel, size_t place) {
  size_t own = kernel == 1 ? 10 : 6;
  return place < own ? sizes[kernel - 1][place] : place < own + appended ? 8 : 0;
}

int cuFuncGetParamInfo(void *kernel, size_t place, size_t *offset, size_t *size) {
  *offset = 0, *size = size_of((int)(intptr_t)kernel, place);
  return *size ? 0 : 1;
}

int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra) {
  int number = (int)(intptr_t)kernel;
  if (number == failing_kernel) return status;
  int64_t *call = calls[count++ % 64];
  memset(call, 0, sizeof calls[0]);
  call[0] = number, call[1] = x * y * z, call[2] = threads * threads_y * threads_z, call[3] = shared;
  call[4] = (int64_t)(intptr_t)stream;
  for (size_t place = 0; size_of(number, place); place++)
    memcpy(call + 5 + place, arguments[place], size_of(number, place));
  return extra ? 1 : 0;
}
