// Reads of many records of a file into rows of memory, by threads that wait for the disk at the same time.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#include "simd.h"

namespace {

constexpr int64_t MAX_PARTS = 1024;  // buffers of one preadv (IOV_MAX)

// One call. Request r takes the records numbers[bounds[r]] .. numbers[bounds[r + 1] - 1] and all between them.
struct Reads {
    const int64_t* numbers;  // [n] rising
    const int64_t* places;   // [n] row of each record
    const int64_t* bounds;   // [requests + 1]
    uint8_t* rows;           // [room, nbytes]
    uint8_t* done;           // [requests] set to 1 for each request that was read in full
    int64_t requests, nbytes;
    int64_t align;     // file offsets and lengths are multiples of it; 1: reads pass through the page cache
    int32_t fd;
    int32_t straight;  // whether rows can take the bytes from the disk; else they come through a thread's buffer
};

// Reads straight into the rows. The bytes between wanted records go to `scratch`, one gap over the other.
bool read_rows(const Reads& call, int64_t low, int64_t high, uint8_t* scratch) {
    struct iovec parts[MAX_PARTS];
    int64_t count = 0, next = call.numbers[low];
    const int64_t start = next * call.nbytes;
    for (int64_t i = low; i < high; i++) {
        const int64_t gap = (call.numbers[i] - next) * call.nbytes;
        uint8_t* row = call.rows + call.places[i] * call.nbytes;
        const struct iovec* last = parts + count - 1;
        const bool joins = count && !gap && static_cast<uint8_t*>(last->iov_base) + last->iov_len == row;
        if (count + 2 > MAX_PARTS) return false;
        if (gap) parts[count++] = {scratch, static_cast<size_t>(gap)};
        if (joins)
            parts[count - 1].iov_len += call.nbytes;
        else
            parts[count++] = {row, static_cast<size_t>(call.nbytes)};
        next = call.numbers[i] + 1;
    }
    return preadv(call.fd, parts, static_cast<int>(count), start) == next * call.nbytes - start;
}

// Reads whole blocks of the file to `scratch`, and copies the records to the rows.
bool read_through(const Reads& call, int64_t low, int64_t high, uint8_t* scratch) {
    const int64_t end = (call.numbers[high - 1] + 1) * call.nbytes;
    const int64_t start = call.numbers[low] * call.nbytes / call.align * call.align;
    const int64_t whole = (end - start + call.align - 1) / call.align * call.align;
    if (pread(call.fd, scratch, whole, start) < end - start) return false;
    for (int64_t i = low; i < high; i++)
        memcpy(call.rows + call.places[i] * call.nbytes, scratch + call.numbers[i] * call.nbytes - start, call.nbytes);
    return true;
}

void read_request(const Reads& call, int64_t request, uint8_t* scratch) {
    const int64_t low = call.bounds[request], high = call.bounds[request + 1];
    const bool read = call.straight ? read_rows(call, low, high, scratch) : read_through(call, low, high, scratch);
    call.done[request] = read;
    if (read && call.align == 1) {
        const int64_t start = call.numbers[low] * call.nbytes, end = (call.numbers[high - 1] + 1) * call.nbytes;
        posix_fadvise(call.fd, start, end - start, POSIX_FADV_DONTNEED);
    }
}

// Threads that wait for calls. All fields but `next` are guarded by `lock`.
struct Readers {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t called = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
    const Reads* call = nullptr;
    std::atomic<int64_t> next{0};  // request that no thread has taken
    int64_t wanted = 0, active = 0;  // threads that shall join the call, and that work on it
    bool ended = false;
    uint8_t* scratch = nullptr;  // [threads + 1, stride], the last for the thread that calls
    int64_t stride = 0, threads = 0, started = 0;
    pthread_t* ids = nullptr;
};

void take_requests(Readers& readers, const Reads& call, int64_t thread) {
    for (int64_t r; (r = readers.next.fetch_add(1)) < call.requests;)
        read_request(call, r, readers.scratch + thread * readers.stride);
}

void* wait_for_calls(void* argument) {
    Readers& readers = *static_cast<Readers*>(argument);
    pthread_mutex_lock(&readers.lock);
    const int64_t thread = readers.started++;
    while (true) {
        while (!readers.ended && !readers.wanted) pthread_cond_wait(&readers.called, &readers.lock);
        if (readers.ended) break;
        readers.wanted--, readers.active++;
        const Reads& call = *readers.call;
        pthread_mutex_unlock(&readers.lock);
        take_requests(readers, call, thread);
        pthread_mutex_lock(&readers.lock);
        if (!--readers.active) pthread_cond_signal(&readers.idle);
    }
    pthread_mutex_unlock(&readers.lock);
    return nullptr;
}

}  // namespace

FLEX_SIZE(reads, Reads)

extern "C" {

// Starts at most `threads` threads, fewer if the system refuses more. Signals stay with the other threads.
void* flex_readers_open(int64_t threads, uint8_t* scratch, int64_t stride) {
    auto* readers = new (std::nothrow) Readers;
    if (!readers) return nullptr;
    readers->scratch = scratch, readers->stride = stride;
    readers->ids = new (std::nothrow) pthread_t[threads];
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t small;  // the usual 8 MiB count where address space is limited
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 20);
    while (readers->ids && readers->threads < threads &&
           !pthread_create(readers->ids + readers->threads, &small, wait_for_calls, readers))
        readers->threads++;
    pthread_attr_destroy(&small);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return readers;
}

// Returns when no thread works on the call any more. One call at a time.
void flex_reads(void* opened, const Reads* call) {
    Readers& readers = *static_cast<Readers*>(opened);
    pthread_mutex_lock(&readers.lock);
    readers.call = call;
    readers.next = 0;
    readers.wanted = call->requests - 1 < readers.threads ? call->requests - 1 : readers.threads;
    for (int64_t i = 0; i < readers.wanted; i++) pthread_cond_signal(&readers.called);
    pthread_mutex_unlock(&readers.lock);
    take_requests(readers, *call, readers.threads);
    pthread_mutex_lock(&readers.lock);
    readers.wanted = 0;
    while (readers.active) pthread_cond_wait(&readers.idle, &readers.lock);
    readers.call = nullptr;
    pthread_mutex_unlock(&readers.lock);
}

void flex_readers_close(void* opened) {
    auto* readers = static_cast<Readers*>(opened);
    pthread_mutex_lock(&readers->lock);
    readers->ended = true;
    pthread_cond_broadcast(&readers->called);
    pthread_mutex_unlock(&readers->lock);
    for (int64_t i = 0; i < readers->threads; i++) pthread_join(readers->ids[i], nullptr);
    delete[] readers->ids;
    delete readers;
}

}  // extern "C"
