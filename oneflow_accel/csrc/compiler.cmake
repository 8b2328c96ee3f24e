# Refuses, before anything is compiled, a compiler that cannot build the kernels: the oldest that has
# __builtin_bit_cast and -march=x86-64-v4 is g++ 11. What Clang 14 builds loads and then crashes.
set(oneflow_accel_oldest_GNU 11)
set(oldest "${oneflow_accel_oldest_${CMAKE_CXX_COMPILER_ID}}")
if(NOT oldest OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS oldest)
  message(FATAL_ERROR "the CPU kernels need g++ 11 or newer, and ${CMAKE_CXX_COMPILER} is "
    "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}; name another compiler by CXX "
    "(Debian: apt-get install g++-11, then CXX=g++-11 make plugin)")
endif()
