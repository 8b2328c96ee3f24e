// Replaces a function that OneFlow's libraries call, in their own procedure linkage tables: for
// what no kernel and no Python can mend.
#pragma once

namespace oneflow_accel {

// Libraries by a part of their paths: OneFlow itself, and its Python module.
constexpr const char* kOneFlowLibrary = "/liboneflow-";
constexpr const char* kPythonModule = "/_oneflow_internal.";

// See redirect_in_oneflow(). What it answers is kept for `python -m oneflow_accel`.
bool redirect_address(const char* library, const char* function, void* replacement);

// Leads the calls of `function`, by its name in the symbol table, that come from `library` to
// `replacement`, which takes the same arguments. A call from the plug-in still reaches the function
// itself. False where the library has no such call, or no slot that can be written.
template <typename Result, typename... Arguments>
bool redirect_in_oneflow(const char* function, Result (*replacement)(Arguments...),
                         const char* library = kOneFlowLibrary) {
  return redirect_address(library, function, reinterpret_cast<void*>(replacement));
}

}  // namespace oneflow_accel
