// Replaces a function that liboneflow calls, in liboneflow's own procedure linkage table: for what
// no kernel and no Python can mend.
#pragma once

namespace oneflow_accel {

// See redirect_in_oneflow().
bool redirect_address(const char* function, void* replacement);

// Leads liboneflow's calls of `function`, by its name in the symbol table, to `replacement`, which
// takes the same arguments. A call from the plug-in still reaches the function itself. False where
// liboneflow has no such call, or no slot that can be written.
template <typename Result, typename... Arguments>
bool redirect_in_oneflow(const char* function, Result (*replacement)(Arguments...)) {
  return redirect_address(function, reinterpret_cast<void*>(replacement));
}

}  // namespace oneflow_accel
