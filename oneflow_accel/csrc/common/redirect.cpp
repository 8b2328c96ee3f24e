#include "common/redirect.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace oneflow_accel {

namespace {

struct Wanted {
  const char* library;
  const char* function;
  void** slot;
};

// A function's static, not a global: files redirect while the library is loaded, in no particular
// order.
std::string& redirections() {
  static std::string lines;
  return lines;
}

template <typename T>
const T* table(const dl_phdr_info& library, ElfW(Addr) address) {
  // glibc has added the load address already, other loaders have not.
  return reinterpret_cast<const T*>(address < library.dlpi_addr ? library.dlpi_addr + address
                                                                : address);
}

// The loader makes this part of a library read-only when it has filled it: with the slots, where
// the library was linked with -z now.
bool is_read_only(const dl_phdr_info& library, ElfW(Addr) offset) {
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    const auto& header = library.dlpi_phdr[i];
    if (header.p_type == PT_GNU_RELRO && offset >= header.p_vaddr
        && offset < header.p_vaddr + header.p_memsz) {
      return true;
    }
  }
  return false;
}

// The slot that calls of `function` from `library` go through, which the loader fills at the first
// call; null where it makes none, or where the slot cannot be written.
void** find_slot(const dl_phdr_info& library, const char* function) {
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    const auto& header = library.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + header.p_vaddr);
    }
  }
  const ElfW(Rela)* slots = nullptr;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  std::size_t bytes = 0;
  for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; ++dynamic) {
    const auto& value = dynamic->d_un;
    if (dynamic->d_tag == DT_JMPREL) { slots = table<ElfW(Rela)>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_SYMTAB) { symbols = table<ElfW(Sym)>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_STRTAB) { names = table<char>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_PLTRELSZ) { bytes = value.d_val; }
  }
  if (slots == nullptr || symbols == nullptr || names == nullptr) { return nullptr; }
  for (std::size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const auto& symbol = symbols[ELF64_R_SYM(slots[i].r_info)];
    if (std::strcmp(names + symbol.st_name, function) != 0) { continue; }
    if (is_read_only(library, slots[i].r_offset)) { return nullptr; }
    return reinterpret_cast<void**>(library.dlpi_addr + slots[i].r_offset);
  }
  return nullptr;
}

int find_in_library(dl_phdr_info* library, std::size_t, void* data) {
  auto* wanted = static_cast<Wanted*>(data);
  if (std::strstr(library->dlpi_name, wanted->library) == nullptr) { return 0; }
  wanted->slot = find_slot(*library, wanted->function);
  return 1;
}

void** find_slot(const char* library, const char* function) {
  Wanted wanted{library, function, nullptr};
  dl_iterate_phdr(find_in_library, &wanted);
  return wanted.slot;
}

}  // namespace

bool redirect_address(const char* library, const char* function, void* replacement) {
  void** slot = find_slot(library, function);
  if (slot != nullptr) { __atomic_store_n(slot, replacement, __ATOMIC_RELEASE); }
  redirections() += std::string(library) + " " + function + (slot != nullptr ? " 1\n" : " 0\n");
  return slot != nullptr;
}

}  // namespace oneflow_accel

extern "C" {

// A line for each redirection that was tried: part of the library's path, function, 1 where it was
// made and 0 where not.
const char* oneflow_accel_redirections() { return oneflow_accel::redirections().c_str(); }

// For tests: whether a call of `function` from a loaded library could be redirected.
int oneflow_accel_can_redirect(const char* library, const char* function) {
  return oneflow_accel::find_slot(library, function) != nullptr ? 1 : 0;
}

}  // extern "C"
