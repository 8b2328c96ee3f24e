#include "common/redirect.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace oneflow_accel {

namespace {

// A function's static, not a global: files redirect while the library is loaded, in no particular
// order.
std::string& redirections() {
  static std::string lines;
  return lines;
}

// The slot that calls of `function` from `library` go through, which the loader fills at the first
// call; null where it makes none, or where the slot cannot be written.
void** find_slot(const dl_phdr_info& library, const char* function) {
  const ElfW(Dyn)* dynamic = nullptr;
  // The loader makes this part of a library read-only when it has filled it: with the slots, where
  // the library was linked with -z now.
  const ElfW(Phdr)* read_only = nullptr;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    const auto& header = library.dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + header.p_vaddr);
    }
    if (header.p_type == PT_GNU_RELRO) { read_only = &header; }
  }
  const auto entry = [&](ElfW(Sxword) tag) -> ElfW(Addr) {
    const auto* it = dynamic;
    while (it != nullptr && it->d_tag != tag && it->d_tag != DT_NULL) { ++it; }
    return it == nullptr || it->d_tag != tag ? 0 : it->d_un.d_ptr;
  };
  const auto table = [&](ElfW(Sxword) tag) {
    const ElfW(Addr) address = entry(tag);
    // glibc has added the load address already, other loaders have not.
    return address != 0 && address < library.dlpi_addr ? library.dlpi_addr + address : address;
  };
  const auto* slots = reinterpret_cast<const ElfW(Rela)*>(table(DT_JMPREL));
  const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(table(DT_SYMTAB));
  const auto* names = reinterpret_cast<const char*>(table(DT_STRTAB));
  if (slots == nullptr || symbols == nullptr || names == nullptr) { return nullptr; }
  const auto* end = slots + entry(DT_PLTRELSZ) / sizeof(ElfW(Rela));
  const auto* slot = std::find_if(slots, end, [&](const ElfW(Rela)& one) {
    return std::strcmp(names + symbols[ELF64_R_SYM(one.r_info)].st_name, function) == 0;
  });
  if (slot == end
      || (read_only != nullptr && slot->r_offset >= read_only->p_vaddr
          && slot->r_offset < read_only->p_vaddr + read_only->p_memsz)) {
    return nullptr;
  }
  return reinterpret_cast<void**>(library.dlpi_addr + slot->r_offset);
}

// In the first library with `library` in its path.
void** find_slot(const char* library, const char* function) {
  struct Search {
    const char* library;
    const char* function;
    void** slot;
  } search{library, function, nullptr};
  dl_iterate_phdr(
      [](dl_phdr_info* found, std::size_t, void* data) {
        auto* wanted = static_cast<Search*>(data);
        if (std::strstr(found->dlpi_name, wanted->library) == nullptr) { return 0; }
        wanted->slot = find_slot(*found, wanted->function);
        return 1;
      },
      &search);
  return search.slot;
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

// For libraries that are loaded beside this one.
bool oneflow_accel_redirect(const char* library, const char* function, void* replacement) {
  return oneflow_accel::redirect_address(library, function, replacement);
}

// For tests: whether a call of `function` from a loaded library could be redirected.
int oneflow_accel_can_redirect(const char* library, const char* function) {
  return oneflow_accel::find_slot(library, function) != nullptr ? 1 : 0;
}

}  // extern "C"
