// Tells the emulated device of each block that torch's caching allocator hands out: it begins as zeros.
#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void emu_forget(void *, size_t);

// Once, after torch has initialised CUDA.
extern "C" void emulated_gpu_attach() {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  allocator::attachAllocatorTraceTracker([](const allocator::TraceEntry &entry) {
    if (entry.action_ == allocator::TraceEntry::ALLOC)
      emu_forget(reinterpret_cast<void *>(entry.addr_), entry.size_);
  });
}
