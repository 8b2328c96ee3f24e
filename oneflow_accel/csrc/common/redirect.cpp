#include "common/redirect.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>

namespace oneflow_accel {

namespace {

struct Redirection {
  const char* function;
  void* replacement;
  bool done;
};

template <typename T>
const T* table(const dl_phdr_info& library, ElfW(Addr) address) {
  // glibc has added the load address already, other loaders have not.
  return reinterpret_cast<const T*>(address < library.dlpi_addr ? library.dlpi_addr + address
                                                                : address);
}

// Leads calls of `function` from `library` to `replacement`; false where it makes none. The slot
// is writable, as the loader fills it at the first call.
bool redirect(const dl_phdr_info& library, const char* function, void* replacement) {
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
    // A library linked with -z now has read-only slots.
    if (dynamic->d_tag == DT_FLAGS && (value.d_val & DF_BIND_NOW) != 0) { return false; }
    if (dynamic->d_tag == DT_JMPREL) { slots = table<ElfW(Rela)>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_SYMTAB) { symbols = table<ElfW(Sym)>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_STRTAB) { names = table<char>(library, value.d_ptr); }
    if (dynamic->d_tag == DT_PLTRELSZ) { bytes = value.d_val; }
  }
  if (slots == nullptr || symbols == nullptr || names == nullptr) { return false; }
  for (std::size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const auto& symbol = symbols[ELF64_R_SYM(slots[i].r_info)];
    if (std::strcmp(names + symbol.st_name, function) != 0) { continue; }
    auto* slot = reinterpret_cast<void**>(library.dlpi_addr + slots[i].r_offset);
    __atomic_store_n(slot, replacement, __ATOMIC_RELEASE);
    return true;
  }
  return false;
}

int redirect_if_oneflow(dl_phdr_info* library, std::size_t, void* data) {
  if (std::strstr(library->dlpi_name, "/liboneflow-") == nullptr) { return 0; }
  auto* wanted = static_cast<Redirection*>(data);
  wanted->done = redirect(*library, wanted->function, wanted->replacement);
  return 1;
}

}  // namespace

bool redirect_address(const char* function, void* replacement) {
  Redirection wanted{function, replacement, false};
  dl_iterate_phdr(redirect_if_oneflow, &wanted);
  return wanted.done;
}

}  // namespace oneflow_accel
