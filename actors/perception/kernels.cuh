// What both kernels of a block share: see kernels.py.
//
// Rings hold the frames before; the slot at distance 0 takes the present frame. All is float32. What a thread needs is loaded
// before anything is stored or waited for: the time is that of one wait for memory.

constexpr int THREADS = 512, WARPS = THREADS / 32;
