// Functions of libraries that the plug-in is not linked to.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace oneflow_accel {

// A library, never closed: it stays for as long as the process lives.
class Library {
 public:
  Library(const char* path, int flags) : handle_(dlopen(path, flags)) {
    if (handle_ == nullptr) {
      const char* reason = dlerror();
      throw std::runtime_error(reason == nullptr ? "it is not loaded" : reason);
    }
  }
  template <typename Symbol>
  void look_up(const char* name, Symbol* symbol) const {
    void* address = dlsym(handle_, name);
    if (address == nullptr) { throw std::runtime_error(std::string("it has no ") + name); }
    *symbol = reinterpret_cast<Symbol>(address);
  }

 private:
  void* handle_;
};

// Calls fn(). Null, or the text of its exception, which stays until the calling thread's next.
template <typename Fn>
const char* reason_against(const Fn& fn) {
  thread_local std::string reason;
  try {
    fn();
  } catch (const std::exception& error) {
    reason = error.what();
    return reason.c_str();
  }
  return nullptr;
}

}  // namespace oneflow_accel
