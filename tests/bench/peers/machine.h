// machine.h: what the numbers were measured on.
#ifndef PEERS_MACHINE_H
#define PEERS_MACHINE_H

// Prints the processor, its vector extensions, the compiler and the load.
void machine_print(void);

// Gflop/s of fp32 multiply-adds in registers, one thread, CPU time, of about 10 ms.
double machine_peak_gflops(void);

#endif
