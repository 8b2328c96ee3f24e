// Whether the memory that is asked for is there. The system promises more than it has, and kills
// whoever uses it.
#pragma once

#include <cstdint>
#include <string>

namespace oneflow_accel {

// What to say where `bytes` more do not fit into the memory that is left; empty where they do.
std::string lack_of_memory(int64_t bytes);

// Whether there is memory at `data`, which may have been given out though it did not fit.
bool may_write(const void* data, int64_t bytes);

// To be raised in Python as failures of kernels are. No kernel runs until it is.
void record_lack_of_memory(const std::string& message);

// Whether one waits to be raised, and whether there ever was one.
bool starved();
bool has_starved();

}  // namespace oneflow_accel
