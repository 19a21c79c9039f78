// Scratch memory that only grows, each piece aligned to a cache line: a vector across two lines is loaded twice, and a
// tile of sixteen of them takes twice as long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace sparring {

template <class T> struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <class U> LineAllocator(const LineAllocator<U> &) {}
    T *allocate(std::size_t count) { return (T *)::operator new(count * sizeof(T), std::align_val_t(64)); }
    void deallocate(T *p, std::size_t) { ::operator delete(p, std::align_val_t(64)); }
    template <class U> bool operator==(const LineAllocator<U> &) const { return true; }
};

template <class T> struct Buffer {
    std::vector<T, LineAllocator<T>> values;

    T *room(int64_t count) {
        if ((int64_t)values.size() < count) values.resize(count);
        return values.data();
    }
};

}  // namespace sparring
