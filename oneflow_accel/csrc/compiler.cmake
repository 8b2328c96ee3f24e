# Refuses, before anything is compiled, a compiler that cannot build the kernels: the oldest that has
# __builtin_bit_cast and -march=x86-64-v4 is g++ 11. What Clang 14 builds loads and then crashes.
set(oneflow_accel_oldest_GNU 11)
set(oldest "${oneflow_accel_oldest_${CMAKE_CXX_COMPILER_ID}}")
if(NOT oldest OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS oldest)
  message(FATAL_ERROR "the CPU kernels need g++ 11 or newer, and ${CMAKE_CXX_COMPILER} is "
    "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}; name another compiler by CXX "
    "(Debian: apt-get install g++-11, then CXX=g++-11 make plugin)")
endif()
# The kernels have AMX's instructions, which assemblers know since binutils 2.35, whatever the g++.
execute_process(
  COMMAND echo "tdpbf16ps %tmm2, %tmm1, %tmm0"
  COMMAND ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_ARG1} -x assembler -c -o /dev/null -
  RESULT_VARIABLE refused OUTPUT_QUIET ERROR_QUIET)
if(NOT refused EQUAL 0)
  message(FATAL_ERROR "the CPU kernels need the assembler of binutils 2.35 or newer, and that of "
    "${CMAKE_CXX_COMPILER} does not know AMX (Debian: apt-get install binutils)")
endif()
