#include "copy/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "common/threads.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

namespace {

// Below this many bytes per thread, waking another thread costs more than it saves.
constexpr int64_t kGrainBytes = 64 * 1024;

// Counts through dimensions in row-major order and keeps the offsets in bytes up to date.
class Cursor {
 public:
  Cursor(const std::vector<CopyDim>& dims, std::size_t element_bytes, int64_t index)
      : dims_(dims), bytes_(static_cast<int64_t>(element_bytes)), position_(dims.size()) {
    for (std::size_t k = dims.size(); k-- > 0;) {
      position_[k] = index % dims[k].size;
      index /= dims[k].size;
      advance(dims[k], position_[k]);
    }
  }

  void next() {
    for (std::size_t k = dims_.size(); k-- > 0;) {
      advance(dims_[k], 1);
      if (++position_[k] < dims_[k].size) { return; }
      advance(dims_[k], -dims_[k].size);
      position_[k] = 0;
    }
  }

  int64_t source() const { return source_; }
  int64_t destination() const { return destination_; }

 private:
  void advance(const CopyDim& dim, int64_t steps) {
    source_ += steps * dim.source_stride * bytes_;
    destination_ += steps * dim.destination_stride * bytes_;
  }

  const std::vector<CopyDim>& dims_;
  int64_t bytes_;
  std::vector<int64_t> position_;
  int64_t source_ = 0;
  int64_t destination_ = 0;
};

// The same copy with as few dimensions as possible, in the destination's order.
std::vector<CopyDim> merged(std::vector<CopyDim> dims) {
  dims.erase(std::remove_if(dims.begin(), dims.end(), [](const CopyDim& d) { return d.size == 1; }),
             dims.end());
  std::stable_sort(dims.begin(), dims.end(), [](const CopyDim& a, const CopyDim& b) {
    return a.destination_stride > b.destination_stride;
  });
  std::vector<CopyDim> result;
  for (const CopyDim& inner : dims) {
    if (!result.empty() && result.back().source_stride == inner.source_stride * inner.size
        && result.back().destination_stride == inner.destination_stride * inner.size) {
      result.back() = {result.back().size * inner.size, inner.source_stride,
                       inner.destination_stride};
    } else {
      result.push_back(inner);
    }
  }
  if (result.empty()) { result.push_back({1, 1, 1}); }
  return result;
}

int64_t count(const std::vector<CopyDim>& dims) {
  int64_t n = 1;
  for (const CopyDim& dim : dims) { n *= dim.size; }
  return n;
}

template <typename T>
void copy_run(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t n) {
  const auto* source = reinterpret_cast<const T*>(from);
  auto* destination = reinterpret_cast<T*>(to);
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(destination, source, n * sizeof(T));
  } else if (to_stride == 1 && from_stride == 0) {
    std::fill_n(destination, n, *source);
  } else {
    for (int64_t i = 0; i < n; ++i) { destination[i * to_stride] = source[i * from_stride]; }
  }
}

// Runs up to this long, such as the heads of attention, cost less copied here than by a call each.
constexpr int64_t kShortRunBytes = 1024;
constexpr int64_t kPieceBytes = 64;

// `rows` runs of `bytes` >= kPieceBytes bytes; strides count bytes. The last piece of a run may
// overlap the one before.
void copy_short_runs(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                     int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r) {
    const char* source = from + r * from_stride;
    char* destination = to + r * to_stride;
    for (int64_t i = 0; i < bytes - kPieceBytes; i += kPieceBytes) {
      std::memcpy(destination + i, source + i, kPieceBytes);
    }
    const int64_t last = bytes - kPieceBytes;
    std::memcpy(destination + last, source + last, kPieceBytes);
  }
}

// Copies short runs that are contiguous on both sides: (outer, rows, run).
void copy_rows(const std::vector<CopyDim>& outer, const CopyDim& rows, int64_t run_bytes,
               std::size_t element_bytes, const char* source, char* destination) {
  const auto bytes = static_cast<int64_t>(element_bytes);
  const int64_t from_stride = rows.source_stride * bytes;
  const int64_t to_stride = rows.destination_stride * bytes;
  parallel_for(count(outer) * rows.size, kGrainBytes / run_bytes, [&](int64_t begin, int64_t end) {
    Cursor cursor(outer, element_bytes, begin / rows.size);
    int64_t skip = begin % rows.size;
    while (begin < end) {
      const int64_t n = std::min(rows.size - skip, end - begin);
      copy_short_runs(source + cursor.source() + skip * from_stride, from_stride,
                      destination + cursor.destination() + skip * to_stride, to_stride, n,
                      run_bytes);
      begin += n;
      skip = 0;
      cursor.next();
    }
  });
}

// Copies runs along the last dimension. The threads share out elements, so that few long runs
// keep all of them busy as well.
template <typename T>
void copy_runs(std::vector<CopyDim> dims, const char* source, char* destination) {
  const CopyDim run = dims.back();
  dims.pop_back();
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  parallel_for(count(dims) * run.size, kGrainBytes / kBytes, [&](int64_t begin, int64_t end) {
    Cursor cursor(dims, sizeof(T), begin / run.size);
    int64_t skip = begin % run.size;
    while (begin < end) {
      const int64_t n = std::min(run.size - skip, end - begin);
      copy_run<T>(source + cursor.source() + skip * run.source_stride * kBytes, run.source_stride,
                  destination + cursor.destination() + skip * run.destination_stride * kBytes,
                  run.destination_stride, n);
      begin += n;
      skip = 0;
      cursor.next();
    }
  });
}

// Copies tiles over the dimension that is contiguous in the source, `columns`, and the one that is
// contiguous in the destination, `rows`.
void copy_tiles(const std::vector<CopyDim>& outer, const CopyDim& rows, const CopyDim& columns,
                std::size_t element_bytes, const char* source, char* destination) {
  const auto bytes = static_cast<int64_t>(element_bytes);
  const int64_t row_tiles = (rows.size + kTransposeTile - 1) / kTransposeTile;
  const int64_t column_tiles = (columns.size + kTransposeTile - 1) / kTransposeTile;
  std::vector<CopyDim> tiles = outer;
  // Strides of whole tiles; the last one of each may be smaller.
  tiles.push_back(
      {column_tiles, kTransposeTile, kTransposeTile * columns.destination_stride});
  tiles.push_back({row_tiles, kTransposeTile * rows.source_stride, kTransposeTile});
  const int64_t tile_bytes = bytes * std::min(rows.size, kTransposeTile)
                             * std::min(columns.size, kTransposeTile);
  const int64_t grain = std::max<int64_t>(kGrainBytes / tile_bytes, 1);
  parallel_for(count(tiles), grain, [&](int64_t begin, int64_t end) {
    Cursor cursor(tiles, element_bytes, begin);
    for (int64_t i = begin; i < end; ++i, cursor.next()) {
      const int64_t row = i % row_tiles * kTransposeTile;
      const int64_t column = i / row_tiles % column_tiles * kTransposeTile;
      transpose_tile(element_bytes, source + cursor.source(), rows.source_stride,
                     destination + cursor.destination(), columns.destination_stride,
                     std::min(rows.size - row, kTransposeTile),
                     std::min(columns.size - column, kTransposeTile));
    }
  });
}

}  // namespace

void strided_copy(std::vector<CopyDim> dims, std::size_t element_bytes, const void* source,
                  void* destination) {
  if (count(dims) == 0) { return; }
  dims = merged(std::move(dims));
  const auto* from = static_cast<const char*>(source);
  auto* to = static_cast<char*>(destination);
  const CopyDim last = dims.back();
  if (last.destination_stride == 1 && last.source_stride != 1) {
    const auto columns = std::find_if(dims.begin(), dims.end(), [](const CopyDim& dim) {
      return dim.source_stride == 1;
    });
    if (columns != dims.end()) {
      const CopyDim column = *columns;
      dims.erase(columns);
      dims.pop_back();
      return copy_tiles(dims, last, column, element_bytes, from, to);
    }
  }
  const int64_t run_bytes = last.size * static_cast<int64_t>(element_bytes);
  if (dims.size() > 1 && last.destination_stride == 1 && last.source_stride == 1
      && run_bytes >= kPieceBytes && run_bytes <= kShortRunBytes) {
    const CopyDim rows = dims[dims.size() - 2];
    dims.resize(dims.size() - 2);
    return copy_rows(dims, rows, run_bytes, element_bytes, from, to);
  }
  switch (element_bytes) {
    case 8: return copy_runs<uint64_t>(std::move(dims), from, to);
    case 4: return copy_runs<uint32_t>(std::move(dims), from, to);
    case 2: return copy_runs<uint16_t>(std::move(dims), from, to);
    default: return copy_runs<uint8_t>(std::move(dims), from, to);
  }
}

void zero_fill(void* destination, int64_t bytes) {
  auto* to = static_cast<char*>(destination);
  parallel_for(bytes, kGrainBytes,
               [=](int64_t begin, int64_t end) { std::memset(to + begin, 0, end - begin); });
}

}  // namespace oneflow_accel
