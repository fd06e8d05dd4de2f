// Runs the blocks of a kernel on a CPU. A block is one CPU thread, so blocks that wait for each other make progress. Its
// threads are fibers of that CPU thread, resumed in turn, forwards and backwards, so that the results do not depend on the
// machine. Misuse becomes a message: the first of a launch ends it.
#include <link.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_emulation.h"
#undef while
#undef alignas

namespace {

using Clock = std::chrono::steady_clock;

// Not a power of two: the same local variables of all fibers would fall into the same few lines of the cache.
constexpr size_t STACK = (64 << 10) + 17 * 64;
constexpr uint64_t CANARY = 0xa5a5a5a5a5a5a5a5u;
constexpr size_t STATIC_SHARED = 48 << 10;

// Blocks that can run at once: one on each processor of the GPU this stands for.
constexpr unsigned MOST_WORKERS = 132;

// A block whose threads have only looped for so long waits for nothing.
constexpr std::chrono::seconds PATIENCE(10);

struct Buffer {
  const char* name;
  void* data;
  size_t bytes;
  bool written;
};

struct Kernel {
  void (*entry)(void* const* buffers);
  void* (*anchor)();  // the address of a thread_local of the kernel's library
};

// A copy of a buffer whose end is the end of a page, before one that nobody may touch.
class Guarded {
 public:
  explicit Guarded(const Buffer& buffer) : buffer_(buffer) {
    const size_t page = sysconf(_SC_PAGESIZE);
    size_ = (buffer.bytes / page + 2) * page;
    pages_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    size_ -= page;
    memset(pages_, 0xa5, size_);
    mprotect(pages_ + size_, page, PROT_NONE);
    data = pages_ + ((size_ - buffer.bytes) & ~size_t{15});
    memcpy(data, buffer.data, buffer.bytes);
    if (!buffer.written) mprotect(pages_, size_, PROT_READ);
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(pages_, size_ + sysconf(_SC_PAGESIZE)); }

  std::string touched(const char* address) const {
    if (address >= pages_ && address < pages_ + size_) return "a thread writes to " + name() + ", an input";
    if (address < pages_ || address >= pages_ + size_ + sysconf(_SC_PAGESIZE)) return "";
    return "a thread reads or writes " + std::to_string(address - data) + " bytes from the start of " + name() +
           ", which has " + std::to_string(buffer_.bytes);
  }

  std::string finish() {
    if (!buffer_.written) return "";
    const auto untouched = [](char c) { return c == '\xa5'; };
    if (!std::all_of(pages_, data, untouched)) return "a thread writes before the start of " + name();
    if (!std::all_of(data + buffer_.bytes, pages_ + size_, untouched)) return "a thread writes past the end of " + name();
    memcpy(buffer_.data, data, buffer_.bytes);
    return "";
  }

  char* data;

 private:
  std::string name() const { return std::string("`") + buffer_.name + "`"; }

  const Buffer& buffer_;
  char* pages_;
  size_t size_;
};

struct Worker;

struct Launch {
  Kernel kernel;
  dim3 blocks, threads;
  size_t dynamic_shared;
  std::vector<void*> pointers;
  std::vector<std::unique_ptr<Guarded>> buffers;

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::thread> workers;
  unsigned running = 0;
  std::string failure;
  std::atomic<bool> failed{false};
  std::atomic<unsigned> next{0}, finished{0};

  unsigned count() const { return blocks.x * blocks.y * blocks.z; }
  void fail(const std::string& message);
  void add_worker();
  void run();
};

enum State { READY, AT_BARRIER, IN_WARP, DONE };

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  Place place;
  jmp_buf context;
  State state;
  bool started, spun;
  char* stack;
  Site site;
  int predicate;
  WarpOperation operation;
  unsigned mask;
  uint64_t value, result;
  int source;
  std::deque<std::vector<AsyncCopy>> copies;  // groups, the last of them not committed yet
};

struct Warp {
  unsigned alive, waiting;  // sets of lanes
};

thread_local Worker* worker = nullptr;

std::string text(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

std::string text(uint3 at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

// One CPU thread that runs blocks, one after the other.
struct Worker {
  explicit Worker(Launch& launch) : launch(launch), fibers(launch.threads.x * launch.threads.y * launch.threads.z) {
    stacks = static_cast<char*>(
        mmap(nullptr, fibers.size() * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) launch.fail("no address space for the stacks of a block");
    for (size_t i = 0; i < fibers.size(); ++i) {
      fibers[i].started = false;
      fibers[i].stack = stacks + i * STACK;
    }
    stack_t alternative = {};
    alternative.ss_sp = signal_stack;
    alternative.ss_size = sizeof(signal_stack);
    sigaltstack(&alternative, nullptr);
    worker = this;
  }
  ~Worker() {
    worker = nullptr;
    stack_t none = {};
    none.ss_flags = SS_DISABLE;
    sigaltstack(&none, nullptr);
    munmap(stacks, fibers.size() * STACK);
  }

  // Shared memory begins as NaN: nobody promises zeros.
  void begin(unsigned index) {
    std::fill(dynamic_shared.begin(), dynamic_shared.end(), ~uint64_t{0});
    fill_static_shared();
    const uint3 block = {index % launch.blocks.x, index / launch.blocks.x % launch.blocks.y,
                         index / launch.blocks.x / launch.blocks.y};
    const dim3 threads = launch.threads;
    for (unsigned i = 0; i < fibers.size(); ++i) {
      Fiber& f = fibers[i];
      f.copies.clear();
      f.place = {{i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y},
                 block, threads, launch.blocks, dynamic_shared.data(), 0};
      f.state = READY;
    }
    alive = fibers.size();
    at_barrier = 0;
    warps.assign((fibers.size() + 31) / 32, {});
    for (size_t i = 0; i < fibers.size(); ++i) warps[i / 32].alive |= 1u << i % 32;
  }

  void fill_static_shared() {
    const void* anchor = launch.kernel.anchor();
    const auto fill = [](dl_phdr_info* info, size_t, void* anchor) {
      char* start = static_cast<char*>(info->dlpi_tls_data);
      for (int i = 0; start && i < info->dlpi_phnum; ++i) {
        const size_t bytes = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type != PT_TLS || anchor < start || anchor >= start + bytes) continue;
        if (bytes > STATIC_SHARED + 64) return 2;
        memset(start, 0xff, bytes);
        return 1;
      }
      return 0;
    };
    if (dl_iterate_phdr(fill, const_cast<void*>(anchor)) == 2) {
      launch.fail("static shared memory of a block is over 48 KiB");
    }
  }

  void run_blocks() {
    dynamic_shared.resize((launch.dynamic_shared + 7) / 8);
    for (unsigned index; !launch.failed && (index = launch.next++) < launch.count();) {
      begin(index);
      run_block();
      ++launch.finished;
      launch.changed.notify_one();
    }
  }

  void run_block() {
    Clock::time_point progress = Clock::now();
    for (bool forwards = true; alive > 0 && !launch.failed; forwards = !forwards) {
      bool resumed = false, spun = true;
      for (size_t i = 0; i < fibers.size() && !launch.failed; ++i) {
        Fiber& f = fibers[forwards ? i : fibers.size() - 1 - i];
        if (f.state != READY) continue;
        resume(f);
        resumed = true;
        spun = spun && f.spun;
      }
      if (!resumed) {
        launch.fail(waiting());
      } else if (!spun) {
        progress = Clock::now();
      } else if (Clock::now() - progress > PATIENCE) {
        launch.fail("block " + text(fibers[0].place.block) + " loops for what never comes");
      } else {
        launch.add_worker();
        sched_yield();
      }
    }
  }

  void resume(Fiber& f) {
    running = &f;
    f.spun = false;
    if (_setjmp(scheduler) == 0) {
      if (f.started) _longjmp(f.context, 1);
      f.started = true;
      memcpy(f.stack, &CANARY, sizeof(CANARY));
      ucontext_t start;
      getcontext(&start);
      start.uc_stack.ss_sp = f.stack;
      start.uc_stack.ss_size = STACK;
      start.uc_link = nullptr;
      makecontext(&start, body, 0);
      setcontext(&start);
    }
    running = nullptr;
    if (memcmp(f.stack, &CANARY, sizeof(CANARY)) != 0) launch.fail("the local variables of a thread are over 64 KiB");
  }

  void leave() {
    if (_setjmp(running->context) == 0) _longjmp(scheduler, 1);
  }

  static void body() {
    for (;;) {
      worker->launch.kernel.entry(worker->launch.pointers.data());
      worker->finish(*worker->running);
      worker->leave();
    }
  }

  void finish(Fiber& f) {
    f.state = DONE;
    --alive;
    if (at_barrier > 0) left_behind();
    Warp& warp = warps[index(f) / 32];
    warp.alive &= ~(1u << index(f) % 32);
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (warp.waiting >> lane & 1) release_warp(fibers[index(f) / 32 * 32 + lane]);
    }
  }

  int barrier(int predicate, Site site) {
    Fiber& f = *running;
    f.state = AT_BARRIER;
    f.site = site;
    f.predicate = predicate;
    ++at_barrier;
    if (alive < fibers.size()) left_behind();
    if (at_barrier == alive) release_barrier(f);
    leave();
    return f.predicate;
  }

  void release_barrier(const Fiber& last) {
    int sum = 0;
    for (const Fiber& f : fibers) {
      sum += f.predicate;
      if (f.site.line != last.site.line || (f.site.file != last.site.file && strcmp(f.site.file, last.site.file) != 0)) {
        launch.fail("threads of a block meet at different barriers: " + text(f.site) + " and " + text(last.site));
      }
    }
    for (Fiber& f : fibers) {
      f.predicate = sum;
      f.state = READY;
    }
    at_barrier = 0;
  }

  uint64_t exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, Site site) {
    Fiber& f = *running;
    f.state = IN_WARP;
    f.site = site;
    f.operation = operation;
    f.mask = mask;
    f.value = value;
    f.source = source;
    warps[index(f) / 32].waiting |= 1u << index(f) % 32;
    if (!(mask >> index(f) % 32 & 1)) launch.fail("a thread calls a warp operation whose mask lacks it, at " + text(site));
    release_warp(f);
    leave();
    return f.result;
  }

  // Lets the lanes of a mask go on if all of them that have not ended are there.
  void release_warp(const Fiber& one) {
    const unsigned mask = one.mask, first = index(one) / 32 * 32;
    const WarpOperation operation = one.operation;
    Warp& warp = warps[first / 32];
    const unsigned all = mask & warp.alive;
    if ((warp.waiting & all) != all) return;
    Fiber* lanes[32] = {};
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (!(all >> lane & 1)) continue;
      Fiber& f = fibers[first + lane];
      if (f.mask != mask || f.operation != operation) return;
      lanes[lane] = &f;
      if (f.value) ballot |= 1u << lane;
    }
    warp.waiting &= ~all;
    for (Fiber* f : lanes) {
      if (!f) continue;
      f->state = READY;
      f->result = ballot;
      if (operation != SHUFFLE) continue;
      if (lanes[f->source]) {
        f->result = lanes[f->source]->value;
      } else {
        launch.fail("lane " + std::to_string(index(*f) % 32) + " takes the value of lane " + std::to_string(f->source) +
                    ", which gives none, at " + text(f->site));
      }
    }
  }

  void left_behind() {
    for (const Fiber& f : fibers) {
      if (f.state != AT_BARRIER) continue;
      launch.fail("a thread ended, so it never comes to the barrier at " + text(f.site));
      return;
    }
  }

  std::string waiting() const {
    std::string message = "deadlock in block " + text(fibers[0].place.block) + ":";
    std::vector<std::string> kinds;
    for (const Fiber& f : fibers) {
      if (f.state == DONE) continue;
      const char* what = f.state == AT_BARRIER ? " a barrier at " : " a warp operation at ";
      kinds.push_back(what + text(f.site));
    }
    std::sort(kinds.begin(), kinds.end());
    for (size_t i = 0; i < kinds.size();) {
      const size_t same = std::upper_bound(kinds.begin(), kinds.end(), kinds[i]) - kinds.begin() - i;
      message += (i ? ", " : " ") + std::to_string(same) + " threads wait in" + kinds[i];
      i += same;
    }
    return message;
  }

  unsigned index(const Fiber& f) const { return &f - fibers.data(); }

  Launch& launch;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<uint64_t> dynamic_shared;
  char* stacks;
  char signal_stack[64 << 10];
  jmp_buf scheduler;
  Fiber* running = nullptr;
  size_t alive = 0, at_barrier = 0;
};

void Launch::fail(const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!failed) failure = message;
  failed = true;
}

void Launch::add_worker() {
  if (next >= count()) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (workers.size() >= std::min(MOST_WORKERS, count())) return;
  ++running;
  workers.emplace_back([this] {
    std::make_unique<Worker>(*this)->run_blocks();
    std::lock_guard<std::mutex> lock(mutex);
    --running;
    changed.notify_one();
  });
}

// Begins with a worker for each core; whenever the blocks that run make none of them end, others join.
void Launch::run() {
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned i = 0; i < std::min(cores, count()); ++i) add_worker();
  std::unique_lock<std::mutex> lock(mutex);
  for (unsigned before = 0; running > 0;) {
    const auto state = changed.wait_for(lock, std::chrono::milliseconds(50));
    if (state == std::cv_status::timeout && finished == before) {
      lock.unlock();
      add_worker();
      lock.lock();
    }
    before = finished;
  }
  lock.unlock();
  for (std::thread& thread : workers) thread.join();
}

struct sigaction before_segv, before_bus;

void on_fault(int signal, siginfo_t* info, void*) {
  if (!worker || !worker->running) {
    sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
    return;
  }
  std::string message;
  for (const auto& buffer : worker->launch.buffers) message += buffer->touched(static_cast<const char*>(info->si_addr));
  worker->launch.fail(message.empty() ? "a thread touches memory that is none of its buffers" : message);
  _longjmp(worker->scheduler, 1);
}

void report(const void* data, const char* what) {
  const Site& site = *static_cast<const Site*>(data);  // each report begins with the place in the source
  if (!worker || !worker->running) return;
  worker->launch.fail(std::string(what) + " at " + text(site));
  worker->leave();
}

}  // namespace

Place* emulated_place() { return &worker->running->place; }
int emulated_barrier(int predicate, Site site) { return worker->barrier(predicate, site); }
uint64_t emulated_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, Site site) {
  return worker->exchange(operation, mask, value, source, site);
}
void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  auto& copies = worker->running->copies;
  if (copies.empty()) copies.emplace_back();
  copies.back().push_back({to, from, bytes});
}
void __pipeline_commit() {
  auto& copies = worker->running->copies;
  if (copies.empty()) copies.emplace_back();
  copies.emplace_back();
}
void __pipeline_wait_prior(size_t groups) {
  for (auto& copies = worker->running->copies; copies.size() > groups + 1; copies.pop_front()) {
    for (const AsyncCopy& copy : copies.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
}
void emulated_spin() {
  worker->running->spun = true;
  worker->leave();
}

// What -fsanitize calls. Linking its own library would end the process.
extern "C" {
void __ubsan_handle_type_mismatch_v1(void* data, uintptr_t) { report(data, "misaligned or null pointer"); }
void __ubsan_handle_out_of_bounds(void* data, uintptr_t) { report(data, "index out of the bounds of its array"); }
void __ubsan_handle_shift_out_of_bounds(void* data, uintptr_t, uintptr_t) { report(data, "shift by too many bits"); }
void __ubsan_handle_divrem_overflow(void* data, uintptr_t, uintptr_t) { report(data, "integer division by zero"); }

// Returns whether all went well; else `message` says what did not.
bool emulated_launch(Kernel kernel, const Buffer* buffers, size_t count, const unsigned* grid, const unsigned* block,
                     size_t dynamic_shared, char* message, size_t room) {
  Launch launch;
  launch.kernel = kernel;
  launch.blocks = {grid[0], grid[1], grid[2]};
  launch.threads = {block[0], block[1], block[2]};
  launch.dynamic_shared = dynamic_shared;
  for (size_t i = 0; i < count; ++i) {
    launch.buffers.push_back(std::make_unique<Guarded>(buffers[i]));
    launch.pointers.push_back(launch.buffers.back()->data);
  }
  struct sigaction fault = {};
  fault.sa_sigaction = on_fault;
  fault.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &fault, &before_segv);
  sigaction(SIGBUS, &fault, &before_bus);
  launch.run();
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
  for (auto& buffer : launch.buffers) {
    const std::string wrong = buffer->finish();
    if (!wrong.empty()) launch.fail(wrong);
  }
  snprintf(message, room, "%s", launch.failure.c_str());
  return !launch.failed;
}
}
